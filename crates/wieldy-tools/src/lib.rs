//! wieldy-tools
