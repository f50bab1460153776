# SPDX-License-Identifier: Apache-2.0
"""What makes other projects use this one. A package for each: it alone knows that project, and nothing imports it."""
