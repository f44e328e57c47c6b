"""What an author writes, a strategy, and what it is given and answers: views, plans, budgets, checks of plans."""
