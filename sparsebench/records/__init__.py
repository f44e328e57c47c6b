"""What is stored of cells, and read again. Imports no torch."""
