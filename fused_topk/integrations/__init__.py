# SPDX-License-Identifier: Apache-2.0
"""How other projects use this one. Each has a package here, which alone knows the project. Nothing else imports it."""
