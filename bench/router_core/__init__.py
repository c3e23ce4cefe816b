"""A router whose middle is compiled: a prototype that says what that would save (docs/adr/0014)."""
