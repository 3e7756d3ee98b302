"""What is said of classes: tables, patterns, nested folders, levels."""
