#!/usr/bin/env bash
# Installs Debian's Chromium for tests/test_report_browser.py where that is possible; says why where it is not, and
# succeeds all the same: without a browser those tests are skipped.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
if ! command -v apt-get >/dev/null; then
    echo "no Chromium and no apt-get: the browser tests of the report will be skipped" >&2
elif [ "$(id -u)" -ne 0 ]; then
    echo "no Chromium, and only root may install it (apt-get install chromium): the browser tests will be skipped" >&2
else
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core; } >/dev/null ||
        echo "Chromium could not be installed: the browser tests of the report will be skipped" >&2
fi
