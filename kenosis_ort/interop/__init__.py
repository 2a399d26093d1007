"""Reading quantized models of other tools and writing them in another format."""
