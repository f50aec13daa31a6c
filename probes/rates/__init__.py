"""Learning rates of their own for the query-key and output-value circuits."""
