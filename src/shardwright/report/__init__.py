"""Showing: values become terminal tables, one HTML page, or a trace file.

Reports read the nouns and decide nothing. They need no server, no network and no torch.
"""
