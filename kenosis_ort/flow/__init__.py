"""Flow of a quantization from call to report, a file a station."""
