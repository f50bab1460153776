# SPDX-License-Identifier: Apache-2.0
"""A catalogue of the items that may be written, on a device."""
