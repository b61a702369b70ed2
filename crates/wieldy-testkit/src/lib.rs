//! wieldy-testkit
