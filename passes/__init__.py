"""Graph in, graph out: find linear sites, name them, form chains, rewrite them to fp4 nodes."""
