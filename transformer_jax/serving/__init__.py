"""A translation service: HTTP for programs, a page for people."""
