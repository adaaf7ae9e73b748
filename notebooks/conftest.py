"""For the notebooks that nbval runs: no record of progress is written, and outputs name no backend."""

import os

os.environ |= {"ZEROLAB_PROGRESS": "off", "ZEROLAB_BACKEND_LINE": "off"}
