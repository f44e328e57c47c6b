"""The base class of strategies, and what they read and return: views, plans, budgets, checks of plans."""
