"""Many models, a call of ``kenosis-ort quantize`` for each: jobs, how they run, and the table of results."""
