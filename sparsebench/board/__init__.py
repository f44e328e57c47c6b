"""The leaderboard: a pure function of records. Imports no torch."""
