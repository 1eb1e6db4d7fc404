"""What operators hold: bytes that autograd keeps until backward, and those needed for a moment."""
