"""What users read: errors, text and JSON."""
