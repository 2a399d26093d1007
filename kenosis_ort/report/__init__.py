"""Report of a quantization: pure data, what is gathered for it, as text (`text`) and as a page (`html`)."""
