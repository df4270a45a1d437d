# SPDX-License-Identifier: Apache-2.0
"""Version 1 of the API. Fields are only added; a change that breaks a client is version 2."""
