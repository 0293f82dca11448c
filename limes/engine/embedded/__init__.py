"""The embedded engine: it samples with the training module itself."""
