"""What `tokenspeed.LLM` is made of."""
