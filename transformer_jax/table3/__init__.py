"""Table 3 of the paper: its rows as runs, and their figures beside the paper's."""
