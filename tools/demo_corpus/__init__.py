"""The text that the demo model is trained on, and how it becomes training samples."""
