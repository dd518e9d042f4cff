"""Stand-ins for what runs on Trainium: enough of a device, of NKI and of torch-neuronx to run and test without the hardware.

device         a C++ PrivateUse1 backend named neuron, with memory that host code cannot touch
nki            a functional simulator of the NKI calls that kernels use; importable as `nki` after stub.install()
torch_neuronx  its entry points; importable as `torch_neuronx` after stub.install()

Each does what its original documents and refuses what its original refuses. Results are simulated, never measured.
Nothing here imports the product.
"""
