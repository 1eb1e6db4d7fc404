"""The version of this package, which plans carry."""

VERSION = "0.1.0"
