"""What is tried for accuracy, and the one evaluator that says what is kept."""
