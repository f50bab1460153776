# SPDX-License-Identifier: Apache-2.0
"""A catalogue of items that texts may be, on a device."""
