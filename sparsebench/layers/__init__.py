"""Parts of timm's networks: stems, attention and what it shows, rotary embeddings, cut blocks, files of weights."""
