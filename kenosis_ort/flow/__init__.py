"""From a call to a report: the request, the steps, and the run that strings them together."""
