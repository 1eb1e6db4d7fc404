"""Changes of single decisions that the simulator judges: Markov chains, and refinement."""
