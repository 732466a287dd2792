"""Parts that stand in for torchtitan's where a device asks for it; each says why, and when it can go."""
