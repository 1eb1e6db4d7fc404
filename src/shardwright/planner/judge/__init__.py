"""The one judge of strategies: lowered, simulated, and compared within the error of predictions."""
