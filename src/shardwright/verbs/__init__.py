"""What the verbs of ``api`` are made of: requests and results, studies, training, verification."""
