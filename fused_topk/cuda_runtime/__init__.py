# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime by itself: kernels of csrc/ are compiled, kept on disk, loaded and launched."""
