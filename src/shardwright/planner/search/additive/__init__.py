"""The additive model of one arrangement: decisions, what they cost, and exact answers to it."""
