"""Parts of timm's networks: stems, rotary embeddings, cut blocks, files of weights."""
