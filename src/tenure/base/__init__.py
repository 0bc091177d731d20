"""What every package but ``core`` may use. These modules know nothing of elections, and import nothing of Tenure."""
