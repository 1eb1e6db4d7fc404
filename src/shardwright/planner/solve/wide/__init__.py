"""Parts of a solver of wide graphs: problems too wide to eliminate, with memory limited at every time point.

A problem is made smaller (``compact``), bounded by messages (``dual``) and solved region by region (``descent``).
"""
