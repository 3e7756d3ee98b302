"""Files in folders and archives, behind one face."""
