"""What to try next: each module proposes plans of one kind (``loop``)."""
