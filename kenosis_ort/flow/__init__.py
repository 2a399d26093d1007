"""Flow of a quantization from call to report: the request, the steps, and the run that calls them."""
