"""The doing wing: captures, measures and runs. It obeys a plan and decides nothing."""
