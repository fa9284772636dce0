"""A translation server: an HTTP API, compatible with LibreTranslate, and a web UI."""
