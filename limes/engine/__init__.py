"""Engines: what samples answers."""
