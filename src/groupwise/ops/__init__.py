"""What computes: the operations that models and objectives are made of, with their gradients.

In: tensors. Out: tensors. `linear_cross_entropy` gives log-probs and entropies of chosen tokens
    without ever holding (tokens, vocabulary); `functional` has the blocks' operations (attention,
    MLP, norms, linear layers); `matmul` has the products, and `in_place_gradients` says where
    gradients are summed. The operations take the C++ kernels of the package `groupwise-cpu` where
    it is installed (`kernels` says for which tensors); torch's own operations compute the same to
    rounding everywhere else.
"""
