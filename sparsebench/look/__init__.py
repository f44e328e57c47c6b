"""Pictures and tables of what strategies keep."""
