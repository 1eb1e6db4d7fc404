"""What operators have to do: products of matrices, flops, and the tensors that pass through memory."""
