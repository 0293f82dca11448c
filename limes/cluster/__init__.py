"""Where roles run, and the handles the loop drives them by."""
