"""A translation server: an HTTP API (LibreTranslate's) and a web UI."""
