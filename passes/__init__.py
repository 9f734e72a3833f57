"""Graph in, graph out: the linears of a captured graph become fp4 operators.

A torch.compile backend receives a Dynamo graph; the passes rewrite it in place before Inductor
sees it. In the order of their work:

| module | does | returns |
|---|---|---|
| `sites` | `find_sites(gm)`: linears in every spelling, in every inner graph | sites |
| `spellings` | `calls(node)`: linear, addmm, matmul, einsum as x and weight | operands |
| `autocast` | `autocast_at(node, device, calls)`: whether operands are cast | bool |
| `weights` | `weight_of(node)`: the parameter behind casts and transposes | parameter |
| `names` | `layer_name(site)`, `param_source(site)`: which layer it is | names, sources |
| `activations` | `recognise(out, inputs)`: what the nodes between linears compute | activation |
| `chains` | `find_chains(sites)`: linear -> activation -> linear, gated MLPs | chains |
| `rewrite` | `rewrite(gm, decide)`: puts `torch.ops.fp4` operators in place | rows, counts |
| `cse` | `merge_equal(gm)`: equal inputs quantized once, in `no_grad` graphs | count |
| `printer` | `print_graph(gm)`, `print_saved(fw, bw)`: one text on all versions | text |

`nodes` gives an operation one name in all its spellings. A pass that changes a graph ends in
``lint(); recompile()`` and returns how much it changed; a layer that cannot be rewritten keeps its
meaning and gets a reason in its row.
"""
