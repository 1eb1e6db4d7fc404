"""One fork server for all tests of a process: who starts it first decides what it has imported."""

import multiprocessing

from shardwright.runtime.launch import CAPTURING, PRELOADED

multiprocessing.set_forkserver_preload([*PRELOADED, *CAPTURING])
